# SPDX-License-Identifier: Apache-2.0
"""What templates are rendered with: conversations with tools, system messages, unicode, odd whitespace."""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a place – now.\nIn °C.",
    "parameters": {"type": "object", "required": ["place"], "properties": {
        "place": {"type": "string", "description": "a \"town\" <b>&</b>"},
        "days": {"type": "integer", "description": "how many", "default": 1, "enum": [1, 2, 7]},
        "exact": {"type": ["boolean", "null"], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "scale": {"type": "number", "default": 1.5}}}}}
CLOCK = {"type": "function", "function": {
    "name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}}}
# Plain types only: some templates take no others.
ROOM = {"type": "function", "function": {
    "name": "book_room", "description": "Books a room.", "parameters": {"type": "object", "required": ["city", "nights"], "properties": {
        "city": {"type": "string", "description": "where"}, "nights": {"type": "integer", "description": "how many"},
        "extras": {"type": "array", "description": "wishes", "items": {"type": "string"}},
        "guest": {"type": "object", "description": "who", "properties": {"name": {"type": "string", "description": "n"}}}}},
    "return": {"type": "string", "description": "a number"}}}
TOOLS = [None, [WEATHER], [ROOM, CLOCK], [ROOM], [WEATHER, CLOCK]]


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id="abcdef123"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, id="abcdef123", name="get_weather"):
    return {"role": "tool", "content": text, "tool_call_id": id, "name": name}


CALLS = [call("get_weather", {"place": "Köln", "days": 2}), call("get_time", {}, "ghijkl456")]
MESSAGES = [
    [user("Hello")],
    [system("Be brief."), user("What is 2+2?"), assistant("4"), user("And 3+3?")],
    [user("Grüße, 世界! 👋🏽 \u200d e\u0301 \u00a0x"), assistant("¡Hola!\n\n- a\n- b"), user(" \n padded \t\n")],
    [system(""), user(""), assistant(""), user("x")],
    [system("  s  "), user("a\n\n"), assistant("<think>\nhm\n</think>\n\nyes", reasoning_content="hm"), user("b")],
    [user("<|im_end|> </s> [INST] {{ x }} {% if %}"), assistant("</think>"), user("'\"\\ \u2028 \x7f")],
    [user("Weather?"), assistant("", tool_calls=CALLS[:1]), result("{\"t\": 21.5}")],
    [system("S"), user("Weather?"), assistant("Let me see.", tool_calls=CALLS), result("21"),
     result("12:00", "ghijkl456", "get_time"), assistant("21 °C at noon."), user("Thanks")],
    [user("Weather?"), assistant(None, tool_calls=CALLS[:1]), result("warm"), assistant("Warm."), user("ok")],
    [user("as text"), assistant("", tool_calls=[call("get_weather", '{"place": "x"}')]), result("[1, 2]")],
    [user("a"), user("b"), assistant("c")],
    [assistant("first"), user("a")],
    [system("one"), system("two"), user("a")],
    [{"role": "developer", "content": "Dev."}, user("a")],
    [user([{"type": "text", "text": "part one"}, {"type": "text", "text": "two"}])],
    [{"role": "nobody", "content": "x"}],
    [],
]

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def all_variables(full):
    """Sets of variables; without `full` those that differ most."""
    for i, messages in enumerate(MESSAGES):
        for tools in TOOLS if full or i in (0, 1, 7) else TOOLS[: 2 if i in (6, 8) else 1]:
            for prompt in (True, False) if full or i < 2 else (i % 2 == 0,):
                variables = {"messages": messages, "add_generation_prompt": prompt, **TOKENS}
                variables["tools"] = tools
                yield variables
    yield {"messages": MESSAGES[4], "add_generation_prompt": True, "enable_thinking": False, "tools": None,
           "documents": [{"title": "T", "text": "some\ntext"}], "date_string": "1 Jan 2020", **TOKENS}
