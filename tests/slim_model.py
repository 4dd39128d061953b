# SPDX-License-Identifier: Apache-2.0
"""Writes a copy of a GGUF model with fewer layers, whose feed-forward layers keep only their first columns: the same
tokenizer, heads and kinds of tensors for a fraction of the arithmetic. What it says has no meaning; it is for tests whose
findings do not depend on it.

  slim_model.py FROM TO [COLUMNS [LAYERS]]
"""
import os
import sys

import gguf


def slim(tensor, columns):
    """The bytes that stay: rows of gate and up, columns of down."""
    if ".ffn_gate." in tensor.name or ".ffn_up." in tensor.name:
        return tensor.data[:columns]
    if ".ffn_down." in tensor.name:
        values, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row = columns // values * size // tensor.data.itemsize
        return tensor.data[:, :row].copy()
    return tensor.data


def is_kept(tensor, layers):
    return not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers


def main(source, target, columns=96, layers=6, added=()):
    """added: more keys of the architecture, as (name, value, gguf.GGUFValueType)."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target + ".new", architecture)
    smaller = {f"{architecture}.feed_forward_length": columns, f"{architecture}.block_count": layers}
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = smaller.get(field.name, field.contents())
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for name, value, kind in added:
        writer.add_key_value(f"{architecture}.{name}", value, kind)
    for tensor in filter(lambda tensor: is_kept(tensor, layers), reader.tensors):
        writer.add_tensor(tensor.name, slim(tensor, columns), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.rename(target + ".new", target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
