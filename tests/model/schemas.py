# SPDX-License-Identifier: Apache-2.0
"""Random schemas of the subset that grammar/grammar.h documents, and random values that satisfy them.

Made from the definitions of JSON Schema alone: nothing here knows how the server writes a value.
"""

import json

FORMATS = ("date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6")
PATTERNS = ("^[a-z]{2,8}$", "^(red|green|blue)-[0-9]+$", "[0-9]{3}", "^\\w+@\\w+\\.(com|org)$", "^[^\"\\\\x]*$", "^\\S{1,5}( \\S{1,5})*$",
            "^[A-Z]\\d{3}-\\d{2}$|^none$", "^(?:a|bc)?d+$", "^é[à-ÿ]{0,3}$", "^[^,;]{1,10}$")
NAMES = ("id", "name", "a b", "naïve", "x\"y", "tags", "value", "kind", "\\", "日本", "next", "size", "namely", "n")


def _integer_limits(random):
    low = random.randint(-3000, 3000)
    high = low + random.choice([0, 1, 7, 90, 5000])
    limits = {}
    if random.random() < 0.7:
        limits[random.choice(["minimum", "exclusiveMinimum"])] = low - 1
    if random.random() < 0.7:
        limits[random.choice(["maximum", "exclusiveMaximum"])] = high + 1
    return limits


def _string(random):
    kind = random.random()
    if kind < 0.2:
        return {"type": "string", "pattern": random.choice(PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": random.choice(FORMATS)}
    schema = {"type": "string"}
    if random.random() < 0.5:
        schema["maxLength"] = random.randint(0, 12)
    if random.random() < 0.4:
        schema["minLength"] = random.randint(0, schema.get("maxLength", 6))
    return schema


def _constants(random):
    values = [1, -7, 2.5, "a", "b c", "\"\n", True, None, [1, "x"], {"k": 1}, "ü", 10**12]
    return random.sample(values, random.randint(1, 4))


def _object(random, depth, refs):
    names = random.sample(NAMES, random.randint(0, 4))
    schema = {"type": "object", "properties": {name: make(random, depth - 1, refs) for name in names}}
    required = [name for name in names if random.random() < 0.5]
    if required:
        schema["required"] = required
    more = random.random()
    if more < 0.3:
        schema["additionalProperties"] = False
    elif more < 0.5:
        schema["additionalProperties"] = make(random, 0, refs)
    elif more < 0.6:
        schema["additionalProperties"] = True
    if not names:
        schema.setdefault("additionalProperties", False)
    return schema


def _array(random, depth, refs):
    schema = {"type": "array"}
    if random.random() < 0.3:
        schema["prefixItems"] = [make(random, depth - 1, refs) for _ in range(random.randint(1, 3))]
    schema["items"] = False if "prefixItems" in schema and random.random() < 0.4 else make(random, depth - 1, refs)
    most = len(schema.get("prefixItems", ())) if schema["items"] is False else 5
    if random.random() < 0.5:
        schema["maxItems"] = random.randint(0, 5)
        most = min(most, schema["maxItems"])
    if random.random() < 0.4:
        schema["minItems"] = random.randint(0, most)
    return schema


def _one_of(random, depth, refs):
    if random.random() < 0.5:
        return {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, "value": make(random, depth - 1, refs)},
                           "required": ["kind"]} for kind in ("p", "q", "r")]}
    return {"oneOf": [{"type": "integer", **_integer_limits(random)}, _string(random), {"type": ["null", "boolean"]}]}


def make(random, depth, refs=()):
    """A schema. depth: how deeply it may nest; refs: pointers that it may refer to."""
    kinds = ["integer", "number", "string", "string", "boolean", "null", "enum", "const", "types"]
    if depth > 0:
        kinds += ["object", "object", "array", "anyOf", "oneOf", "allOf"] + ["ref"] * len(refs)
    kind = random.choice(kinds)
    if kind == "integer":
        return {"type": "integer", **_integer_limits(random)}
    if kind == "number":
        return {"type": "number", **(_integer_limits(random) if random.random() < 0.5 else {})}
    if kind == "string":
        return _string(random)
    if kind == "enum":
        return {"enum": _constants(random)}
    if kind == "const":
        return {"const": _constants(random)[0]}
    if kind == "types":
        return {"type": random.sample(["integer", "string", "boolean", "null"], 2), "maxLength": 4, "minimum": 3}
    if kind == "object":
        return _object(random, depth, refs)
    if kind == "array":
        return _array(random, depth, refs)
    if kind == "anyOf":
        return {"anyOf": [make(random, depth - 1, refs) for _ in range(random.randint(1, 3))], "title": "one of these"}
    if kind == "oneOf":
        return _one_of(random, depth, refs)
    if kind == "allOf":
        return {"allOf": [{"type": "object", "properties": {"id": make(random, 0)}, "required": ["id"]},
                          {"type": "object", "properties": {"size": make(random, depth - 1, refs)}}]}
    if kind == "ref":
        return {"$ref": random.choice(refs)}
    return {"type": kind}


def document(random):
    """A whole schema, half of them with definitions that refer to each other."""
    if random.random() < 0.5:
        return make(random, 3)
    refs = ("#/$defs/node", "#/$defs/leaf")
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                                             "items": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}},
            "required": ["next"]}
    return {**make(random, 2, refs), "$defs": {"node": node, "leaf": make(random, 1)}}


def written(value):
    """As the server writes it with the least white space."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
