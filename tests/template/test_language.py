# SPDX-License-Identifier: Apache-2.0
"""The language itself, construct by construct, against Python's jinja2: the same text, or an error in both."""

import json
import random

import pytest

import reference

VARIABLES = {
    "a": 7, "b": -3, "f": 2.5, "big": 12345678901234567, "yes": True, "no": False, "nil": None, "s": "Hello, World",
    "u": "naïve café 世界 👋🏽 ǆ ÿ", "ws": " \t x y\u00a0\n", "empty": "", "html": "<a href='x'>&\"</a>",
    "l": [3, 1, 2, 1], "words": ["b", "A", "c", "a"], "nested": [[1, "x"], [2, "y"]], "none_list": [],
    "d": {"b": 1, "a": {"c": [1, None, True, 1.5]}, "items": "hidden", "é": "\u2028\x07\"\\"},
    "people": [{"name": "Zoë", "age": 30, "tags": ["x"]}, {"name": "adam", "age": 5}, {"name": "Bob", "age": 30}],
    "floats": [0.1, 1.0, 1e16, 1e-5, 123456.789, 1e22, -0.0, 5e-324, 1.7976931348623157e308, 3.0e-4, 100000.0],
}

EXPRESSIONS = """
1 + 2 * 3 - -4 | a // 2 | b // 2 | a % 3 | b % 5 | a / 2 | 2 ** 10 | 2 ** -1 | 2 ** 3 ** 2 | -2 ** 2 | f * 2 | f // 1 | -f % 2 | 7.5 // 2
a ~ b ~ f ~ yes ~ nil ~ undefined_thing | s + u | 'x' * 3 | 3 * 'ab' | [1] + [2] | [0] * 3 | (1, 2) + (3,) | big * 2 | 1_000 + 0x1f + 0b11 + 0o7 | 1e3 | 1.5e-3
a > b | 1 < 2 < 3 | 1 < 3 < 2 | 1 == 1.0 == true | 'a' < 'b' | [1, 2] < [1, 3] | 'é' > 'z' | nil == none | nil != false | l == [3, 1, 2, 1] | d == d | undefined_thing == other_undefined
yes and no or 'x' | not yes | not not a | nil or 'y' | a and b | 'b' in d | 'ell' in s | 3 in l | 9 not in l | '' in s | 'x' in undefined_thing
'yes' if a else 'no' | 'only' if no | a if b > 0 else f if f > 2 else 'z' | (a if no) is defined | (1, 2) | (1,) | () | [] | {} | {'a': 1, 2: [none, true]} | [1, [2, (3, 'x')]]
d | d.a | d['a'].c | d.a.c[0] | d.a['c'][-1] | d.missing | d['missing'] is defined | d.items() | d['items'] | d.keys() | list(d) is defined | d.values() | d.get('b') | d.get('zz') | d.get('zz', 5) | l.0 | l[10] is defined | people[0].name | s[0] | s[-1] | s[100] is defined | u[12] | d.a.c.4 is defined
l[1:] | l[:-1] | l[::-1] | l[1:3] | l[::2] | l[-2:] | l[5:1] | s[2:5] | s[::-1] | u[::-1] | u[8:13] | u[-9:-1] | s[::3] | s[10:0:-2] | l[3:0:-1] | (1, 2, 3)[1:]
s.upper() | s.lower() | u.upper() | u.title() | s.swapcase() | 'hELLO wORLD'.capitalize() | "they're bill's".title() | ws.strip() | ws.lstrip() | ws.rstrip() | 'xxaxx'.strip('x') | 'abc'.lstrip('ab') | 'abcba'.rstrip('ab')
s.split() | s.split(', ') | s.split('o') | s.split('o', 1) | s.rsplit('o', 1) | ' a  b '.split() | ' a  b c '.split(none, 1) | ' a  b c '.rsplit(none, 1) | 'a,b,,c'.split(',') | ''.split() | ''.split(',') | 'a\\nb\\r\\nc\\n'.splitlines() | 'a\\nb'.splitlines(true)
s.startswith('Hell') | s.startswith(('x', 'H')) | s.endswith('ld') | s.endswith('') | s.startswith('ello', 1) | s.find('o') | s.rfind('o') | s.find('zz') | s.index('W') | s.count('l') | s.count('') | u.find('世') | s.find('o', 5) | 'aaaa'.count('aa') | 'ab'.replace('', '-') | s.replace('l', 'L', 1) | s.replace('zz', 'y')
'-'.join(words) | 'x'.join([]) | 'a'.ljust(4, '.') | 'a'.rjust(4) | 'ab'.center(7, '*') | 'abc'.center(6) | '-42'.zfill(6) | 'a=b=c'.partition('=') | 'a=b=c'.rpartition('=') | 'abc'.partition('-') | 'abc'.rpartition('-') | 'prefix-x'.removeprefix('prefix-') | 'x.py'.removesuffix('.py') | '12'.isdigit() | 'a1'.isalnum() | 'é'.isalpha() | ' '.isspace() | 'AB1'.isupper() | 'ab'.islower() | ''.isdigit()
'{} and {}'.format(1, 'x') | '{1}{0}{k}'.format('a', 'b', k=3) | '{{}}'.format() | '%s-%d-%05.2f-%x' % ('a', 7, 3.14159, 255) | '%s' % l | '%r' % 'x' | '%-5s|%5s' % ('a', 'b') | '%%' % () | '%s %s' % (1,) | '%d' % 'x' | '%+d % d %e' % (1, 2, 12345.678)
s | upper | s | lower | 'foo bar-baz (qux'|title | s | capitalize | ws | trim | 'xxax' | trim('x') | s | replace('o', '0') | s | replace('o', '0', 1) | html | escape | html | e | html | safe | s | length | u | length | l | count | d | length | undefined_thing | length
s | first | s | last | l | first | l | last | none_list | first is defined | l | list | s | list | d | list | d | items | d | items | list | undefined_thing | items | list | l | reverse | list | 'abc' | reverse | l | join | l | join(', ') | people | join(', ', attribute='name') | words | join('é')
l | sort | l | sort(reverse=true) | words | sort | words | sort(case_sensitive=true) | people | sort(attribute='age') | map(attribute='name') | list | people | sort(attribute='age,name') | map(attribute='name') | join | d.a | dictsort | {'B': 1, 'a': 0} | dictsort | {'B': 1, 'a': 0} | dictsort(true) | {'B': 1, 'a': 0} | dictsort(by='value') | {'B': 1, 'a': 0} | dictsort(reverse=true)
l | unique | list | ['a', 'A', 'b'] | unique | list | ['a', 'A'] | unique(true) | list | l | min | l | max | words | max | people | max(attribute='age') | l | sum | people | sum(attribute='age') | people | sum('age', 10) | l | batch(3) | list | l | batch(3, 0) | list | people | groupby('age') | list | none_list | max is defined
people | map(attribute='tags') | list | people | map(attribute='tags', default='none') | list | words | map('upper') | join | l | map('string') | list | words | map('replace', 'a', 'x') | join | l | select('odd') | list | l | reject('odd') | list | l | select | list | [0, '', 1] | reject | list | l | select('gt', 1) | list | l | select('in', [1, 3]) | list | people | selectattr('tags') | list | length | people | selectattr('age', 'equalto', 30) | map(attribute='name') | list | people | selectattr('tags', 'defined') | list | length | people | rejectattr('age', '==', 30) | map(attribute='name') | list | nil | select | list
'42' | int | 'x' | int | 'x' | int(9) | '3.9' | int | 3.9 | int | '0x1f' | int(0, 16) | ' 7 ' | int | '3.5' | float | 'x' | float | 'x' | float(1.5) | 5 | float | -5 | abs | -2.5 | abs | 2.5 | round | 3.5 | round | 2.567 | round(2) | 2.567 | round(1, 'floor') | 2.1 | round(0, 'ceil') | 7 | round | 1234 | round(-2) | yes | int | nil | int
l | string | nil | string | 1.0 | string | undefined_thing | default('d') | nil | default('d') | nil | default('d', true) | '' | d('x', boolean=true) | undefined_thing.x is defined | undefined_thing | default | s | wordcount | 'a b' | urlencode | 'é/?' | urlencode | s | center(20) | 'a\\nb\\n\\nc' | indent | 'a\\nb\\n\\nc' | indent(2, true) | 'a\\n\\nb' | indent('>', blank=true) | 'a\\n' | indent | '%s!' | format('x') | s | attr('upper') is defined
d | tojson | d | tojson(indent=2) | l | tojson | s | tojson | u | tojson | html | tojson | floats | tojson | nil | tojson | yes | tojson | d | tojson(sort_keys=true) | d | tojson(separators=(',', ':')) | {} | tojson(indent=2) | [] | tojson(indent=2) | [[], {}] | tojson(indent=1) | u | tojson(ensure_ascii=true) | {1: 2, none: 3, true: 4, 1.5: 5} | tojson | (1, 2) | tojson | undefined_thing | tojson | 'a\\x00\\x1f\\x7f' | tojson | people | tojson(indent=4)
a is odd | a is even | f is number | a is integer | f is integer | yes is integer | yes is number | f is float | yes is boolean | yes is true | no is false | 1 is true | nil is none | s is string | d is mapping | l is mapping | l is sequence | s is sequence | d is sequence | a is sequence | l is iterable | a is iterable | undefined_thing is sequence | undefined_thing is iterable | s is defined | s is undefined | not s is defined | s is not defined | a is divisibleby 7 | a is divisibleby(3) | a is eq 7 | a is ne 7 | a is lt 8 | a is ge(7) | a is in [7, 8] | a is not in [7] | nil is sameas none | 'AB' is upper | 'ab' is lower | 'Ab' is lower | range is callable | 'upper' is filter | 'odd' is test | s is escaped
floats | floats[0] + 0.2 | 1 / 3 | 1e100 | 1e15 | 123456789012345680.0 | 0.00001 | 1.0 | -0.0 | 10 ** 15 * 1.0 | 1e16 + 1
range(5) | list | range(2, 9, 3) | list | range(5, 0, -2) | list | range(0) | list | dict(a=1, b='x') | dict({'q': 1}, r=2) | namespace(a=1).a | namespace({'z': 3}).z | namespace(a=1).b is defined
"esc: \\t\\n\\\\ \\x41 \\u00e9 \\U0001F44B \\101 \\q \\'" | 'adja' 'cent' | "it's" | ['it\\'s "x"', "it's", '\\n\\x07é\\u200b\\ud7ff'] | '\\0' | 'line\\
join'
strftime_now('%Y-%m-%d') | strftime_now('%d %b %Y %H:%M') | raise_exception('no') | d.pop('a') | l.append(4) | undefined_thing.x | undefined_thing() | undefined_thing + 1 | nil.x | nil.x.y | 1 + 'a' | 'a' + 1 | 1 / 0 | 1 % 0 | [] < {} | nil < 1 | a() | s.nothing() | l | nofilter | a is notest | {[]: 1} | range(10 ** 9) | 'a' | replace | -s | l[1.5] | 1 in 2 | 1 in 'a' | d | dictsort(by='x') | 'a'.join([1]) | l.index(9) | '' | first | nil | length | a | join
html | safe + html | (html | safe) + '<' | '<' + (html | safe) | (html | safe) ~ '<' | (html | e) + '<' | (html | safe) | e | html | e | e | ('<%s>' | safe) % '<' | ('<{}>' | safe).format('&') | ('<' | safe).join(['&', 'b']) | ('<a>' | safe).upper() + '<' | ('<a>' | safe)[1:] + '<' | ('<a>' | safe) * 2 + '<' | ('<a>' | safe).replace('a', '&') | (('<a>' | safe) | replace('a', '&')) + '<' | (('<a>' | safe) | trim) + '<' | ('<a b>' | safe).split()[0] + '<' | ('<' | safe) is escaped | ('<' | safe) + 1 | '%s' % ('<' | safe) + '&' | ('<' | safe | string) + '<' | ('<' | safe | tojson) + '&' | (('<' | safe) | join) + '&' | ('<' | safe)[0] + '&' | (('<' | safe) | first) + '&'
loop | self | 'a' | batch | cycler | 'x'.__class__ | d.__class__.__mro__ | (1).__add__
"""

STATEMENTS = [
    "{% for x in l %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for x in l %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.previtem is defined }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }};{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}|{% for x in l if x > 9 %}{{ x }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in d | dictsort %}{{ k }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}",
    "{% for x in undefined_thing %}x{% else %}none{% endfor %}{% for c in 'héy' %}[{{ c }}]{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{{ a }}",
    "{% for x in l %}{% for y in words %}{{ loop.index }}{{ loop.depth }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}{% for x in (4, 5) %}{{ x }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 5 %}{% endif %}{{ x }}",
    "{% set n = 0 %}{% for i in l %}{{ n }}{% set n = n + i %}{{ n }}{% endfor %}{{ n }}",
    "{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{% set ns.new = 'x' %}{{ ns.new }}{{ ns.zz is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = 3, 4 %}{{ t }}{% set (p, q) = t %}{{ q }}",
    "{% set x %}block {{ a }}{% endset %}{{ x | upper }}{% set y | trim | replace('k', 'q') %}  k {% endset %}[{{ y }}]",
    "{% set ns = namespace() %}{% set ns.x %}in{% endset %}{{ ns.x }}",
    "{% if a > 9 %}1{% elif a > 6 %}2{% elif a %}3{% else %}4{% endif %}{% if nil %}x{% endif %}{% if a, b %}t{% endif %}",
    "{% macro m(x, y=2, z=x) %}<{{ x }}{{ y }}{{ z }}>{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(x=5, z=6) }}{{ m() }}{{ m(1) | length }}",
    "{% macro outer(x) %}{% macro inner(y) %}{{ x }}{{ y }}{% endmacro %}{{ inner(2) }}{% endmacro %}{{ outer(1) }}",
    "{% macro fact(n) %}{{ 1 if n < 2 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(5) }}",
    "{% macro m() %}{{ late }}{% endmacro %}{% set late = 'seen' %}{{ m() }}{% macro v() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ v(1, 2, k=3) }}",
    "{% macro box(t) %}[{{ t }}|{{ caller() }}]{% endmacro %}{% call box('x') %}in{{ a }}{% endcall %}",
    "{% macro each(l) %}{% for i in l %}{{ caller(i) }}{% endfor %}{% endmacro %}{% call(i) each(l) %}({{ i }}){% endcall %}",
    "{% filter upper %}abc {{ s }}{% endfilter %}{% filter replace('a', 'x') | upper %}banana{% endfilter %}",
    "{% with q = 1, r = a %}{{ q }}{{ r }}{% set q = 9 %}{% endwith %}{{ q is defined }}{% with %}{% set z = 1 %}{% endwith %}{{ z }}",
    "{% generation %}in {% set g = 1 %}{{ a }}{% endgeneration %}{{ g is defined }}",
    "{% raw %}{{ not }} {% if %}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  y",
    "a {# comment #} b {#- strip -#} c\n{# line #}\nd {# multi\nline #} e",
    "  {% if true %}\n  x\n  {% endif %}\n  y\n", "\n\n{% set x = 1 %}\n\n{{ x }}\n\n", "a\n  {%- if true -%}  \n b \n {%- endif %}  \nc",
    "  {%+ if true %}x{%+ endif +%}\n y", "{{ a }}\n{{ b }}\n", "{{ a -}} \n x {{- b }}", "x\t {% set y = 1 +%}\nz", "a\r\nb\rc\n\n", "{% if true %}a{% endif %}  {% if true %}b{% endif %}\n   {% if true %}\nc{% endif %}",
    "   {# c #}   {% set x = 1 %}   z", "{{ '}}' }}{{ {'a': {'b': 1}}['a'] }}{{ \"{% x %}\" }}", "{ { x } } {x} #} %} }}", "{{a}}{{ a}}{{a }}{%if a%}x{%endif%}",
    "{% for x in l -%}\n  {{ x }}\n{%- endfor %}", "{% for x in l %}\n{{ x }}\n{% endfor %}\nend",
    # errors
    "{% if %}", "{% if a %}", "{% for x l %}{% endfor %}", "{{ a", "{{ }}", "{% endif %}", "{# x", "{% raw %}x", "{% unknown %}", "{{ 'a }}", "{{ (a }}", "{{ a) }}", "{{ [1, 2 }}",
    "{% set x.y = 1 %}", "{% set d.y = 1 %}", "{% set true = 1 %}", "{% break %}", "{% macro m(x=1, y) %}{% endmacro %}", "{{ m(x=1, 2) }}", "{% for x in a %}{% endfor %}", "{% set a, b = 1, 2, 3 %}",
    "{{ a b }}", "{{ 1 ! 2 }}", "{% include 'x' %}", "{% for %}", "{{ a | }}", "{{ a is }}", "{{ a. }}", "{{ 5 is odd is even }}", "{% else %}", "{% for x in l %}{{ loop.nothing.x }}{% endfor %}",
    "{% macro m(x) %}{% endmacro %}{{ m(1, x=2) }}",
]
# Nested far beyond what any template needs: an error here, whatever Python says.
DEEP = ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "not " * 5000 + "a }}", "{{ " + "-" * 5000 + "1 }}", "{{ a" + ".b" * 5000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000, "{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ a" + " + 1" * 5000 + " }}", "{% filter " + "|".join(["upper"] * 9000) + " %}{% endfilter %}",
        "{% macro r(n) %}{{ r(n + 1) }}{% endmacro %}{{ r(0) }}", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}"]
COSTLY = ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 999999999999 }}", "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
          "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "{{ '%0400d' % 1 * 999999 }}", "{{ [0] * 9999999999 }}", "{{ 'x'.ljust(9999999999) }}"]


# Python objects that are lists here: templates print them by mistake only.
LAZY = ("<generator object", "iterator object", "dict_items(", "dict_keys(", "dict_values(", "range(", "<class", "<Template")


@pytest.fixture(scope="session")
def ours():
    tool = reference.Ours()
    yield tool
    tool.close()


def compare(ours, template):
    text, error = reference.expected(template, VARIABLES)
    our_text, our_error = ours.render(template, VARIABLES)
    if text is not None and any(words in text for words in LAZY):
        return
    assert (our_text, our_error is None) == (text, error is None), (template, error, our_error)
    assert error is None or our_error.startswith("line "), our_error


def test_expressions(ours):
    # A bar with blanks separates expressions where what follows is a whole one: lines are tried as chains too.
    count = 0
    for line in EXPRESSIONS.strip().split("\n"):
        parts = line.split(" | ")
        for begin in range(len(parts)):
            for end in (begin + 1, begin + 2, begin + 3):
                if end <= len(parts):
                    compare(ours, "{{ " + " | ".join(parts[begin:end]) + " }}")
                    count += 1
    assert count > 1000


def test_statements(ours):
    for template in STATEMENTS:
        compare(ours, template)


def test_random_whitespace(ours):
    """Tags, signs and blanks in any order."""
    dice = random.Random(8)
    pieces = ["{%% if a %s%%}", "{%%%s if a %%}", "{%%%s endif %s%%}", "{%% endif %s%%}", "{{%s a %s}}", "{#%s c %s#}", " ", "\n", "\t", "x", "\n\n  "]
    for _ in range(500):
        parts, opened = [], 0
        for _ in range(dice.randrange(1, 9)):
            piece = dice.choice(pieces)
            kind = "endif" if "endif" in piece else "if" if "if" in piece else ""
            if kind == "endif" and opened == 0:
                continue
            opened += {"if": 1, "endif": -1, "": 0}[kind]
            sign = "-" if "{{" in piece else "-+"
            parts.append(piece % tuple(dice.choice(["", *sign]) for _ in range(piece.count("%s"))) if "%" in piece else piece)
        compare(ours, "".join(parts) + "{% endif %}" * opened)


def test_limits(ours):
    for template in DEEP + COSTLY:
        reply = ours.order(template=template, variables={"a": 1}, now=0, steps=300000)
        assert "error" in reply and reply["error"].startswith("line "), (template[:60], reply)


def test_lines_of_errors(ours):
    for template, line in [("a\n\n{{ b.c }}", 3), ("{% if a %}\n{{ a }}\n{% endfor %}", 3), ("x\n{{ a + 'b' }}\n", 2), ("\n{{ raise_exception('x') }}", 2)]:
        assert ours.render(template, {"a": 1})[1].startswith(f"line {line}: "), template


def test_marks(ours):
    """What comes from input is marked, through whatever it goes; roles are not."""
    variables = {"m": {"role": "user", "content": "ab<|x|>é"}, "own": "ab"}
    content = variables["m"]["content"]
    for template in ("[{{ m.content }}]", "{{ '<' ~ m.content ~ '>' }}", "{{ m['content'] | trim | upper }}", "{{ m.content[2:5] }}{{ own }}", "{{ m | tojson }}", "{{ m.content.split('<') | join('-') }}",
                     "{{ '%s!' % m.content }}", "{{ m.content | replace('b', own) }}", "{% set x %}{{ m.content }}{% endset %}{{ x }}", "{{ [m.content] }}", "<|{{ m.role }}|>{{ m.content | reverse }}", "{{ m.content | indent(2) | list | join }}",
                     "{% macro q(x) %}{{ x }}{% endmacro %}{{ q(m.content) }}", "{{ '{}:{}'.format(own, m.content) }}"):
        reply = ours.order(template=template, variables=variables, input=["m"], now=0)
        text = reply["text"].encode()
        marked = b"".join(text[begin:end] for begin, end in reply["input"]).decode()
        assert set(marked) <= set(content + content.upper() + "content" + "role"), (template, reply)
        plain = bytearray(text)
        for begin, end in reply["input"]:
            plain[begin:end] = b"\0" * (end - begin)
        for letter in set(content) - set("ab<|> "):  # those that no template and no other variable has
            assert letter.encode() not in bytes(plain).replace(b"<|user|>", b""), (template, reply)
        assert "user" not in marked
    # a role deeper down is no message's, and nobody has checked it
    deep = {"m": [{"role": "user", "calls": [{"role": "<|x|>"}]}], "t": {"role": "system", "x": {"role": "<|x|>"}}}
    reply = ours.order(template="{{ m[0].role }}{{ m[0].calls[0].role }}{{ t.role }}{{ t.x.role }}", variables=deep, input=["m", "t"], now=0)
    assert reply == {"text": "user<|x|>system<|x|>", "input": [[4, 9], [15, 20]]}


def test_numbers(ours):
    dice = random.Random(9)
    numbers = [dice.uniform(-1, 1) * 10 ** dice.randrange(-30, 30) for _ in range(300)] + [float(dice.randrange(10 ** 18)) for _ in range(50)]
    text, _ = ours.render("{{ n | tojson }}", {"n": numbers})
    assert text == json.dumps(numbers)
