# SPDX-License-Identifier: Apache-2.0
"""embed_text.py TEXT HEADER NAME: writes a C header that defines NAME, a string with the text."""

import json
import sys

text, header, name = sys.argv[1:]
with open(text, encoding="ascii") as lines, open(header, "w", encoding="ascii") as out:
    out.write(f"/* Made of {name.removesuffix('_text')}; do not edit. */\nstatic const char {name}[] =\n")
    for line in lines:
        out.write(f"    {json.dumps(line)}\n")  # JSON's escapes of ASCII are also C's
    out.write("    ;\n")
