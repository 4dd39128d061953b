/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates: whatever the bytes, a template is parsed and rendered or refused with a message, within its limits;
 * the second rendering gives what the first gave; marks cover the text.
 */
#include "tests/fuzz/fuzz.h"

#include "template/template.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 20000, BYTES = 1 << 16 };

static const char messages_text[] =
    "[{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": \"h\u00e9 <|im_end|>\"},"
    "{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"id\": \"abcdefghi\", \"type\": \"function\","
    "\"function\": {\"name\": \"f\", \"arguments\": {\"a\": 1.5, \"b\": [true, null]}}}]},"
    "{\"role\": \"tool\", \"content\": \"-3\", \"tool_call_id\": \"abcdefghi\"}]";
static const char tools_text[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\","
    "\"parameters\": {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"number\"}}}}}]";

static void expect(bool condition) {
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static json_t *messages, *tools;
    if (messages == NULL) {
        messages = json_loads(messages_text, 0, NULL);
        tools = json_loads(tools_text, 0, NULL);
    }
    struct error error = {0};
    struct template *template = template_parse((const char *)data, bytes, &error);
    expect((template == NULL) == (error.message[0] != '\0'));
    if (template == NULL)
        return 0;
    const struct template_variable variables[] = {{"messages", messages, true, "role"}, {"tools", tools, true, NULL},
        {"add_generation_prompt", json_true(), false, NULL}};
    const struct template_options options = {
        .variables = variables, .count = 3, .now = 1722700000, .steps_max = STEPS, .bytes_max = BYTES};
    struct template_text first, second;
    int code = template_render(template, &options, &first, &error);
    expect(template_render(template, &options, &second, NULL) == code);
    expect((code == 0) == (first.text != NULL) && first.bytes <= BYTES && first.bytes == second.bytes);
    if (code == 0) {
        expect(memcmp(first.text, second.text, first.bytes + 1) == 0 && first.text[first.bytes] == '\0');
        for (size_t i = 0; first.input != NULL && i < first.bytes; i++)
            expect(first.input[i] <= 1);
    } else {
        expect(error.message[0] != '\0');
    }
    template_text_free(&first);
    template_text_free(&second);
    template_free(template);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const seeds[] = {
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n' "
        "}}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + "
        "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{%- set ns = namespace(found=false, n=1.5e3) -%}{%- for m in messages[::-1] if m.role is not none -%}\n"
        "{%- if not ns.found and m.content is string and m.content.startswith('h') %}{% set ns.found = true %}"
        "{% break %}{% elif loop.last %}{{ loop.index ~ loop.revindex0 }}{% else %}{% continue %}{% endif %}\n"
        "{%- else %}none{% endfor %}{{ ns.found | tojson }}",
        "{%- macro show(p, level=1, name='x') %}{% if p is mapping %}{% for k, v in p | dictsort %}{{ '  ' * level }}"
        "{{ k }}: {{ show(v, level + 1) }}{% endfor %}{% elif p is sequence and p is not string %}{{ p | join(', ') }}"
        "{% else %}{{ p }}{{ varargs }}{{ kwargs }}{% endif %}{% endmacro %}{{ show(tools[0].function, name='y') }}",
        "{{ tools | tojson(indent=4) }}{{ tools | map(attribute='function.name') | list | first | upper }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('content') | "
        "map(attribute='role') | unique | sort(reverse=true) | join('-') }}{{ [3, 1, 2] | sort | last | string }}",
        "{% set x %}a{{ 1 + 2 * 3 ** 2 // 4 % 5 - -1 }}\tb{% endset %}{{ x.split('b')[0].strip() | replace('a', 'cc') "
        "| "
        "indent(2, true) | title | trim }}{{ '%05.1f|%-4s|%x' % (1.25, 'ab', 255) }}{{ '{} {0} {n}'.format(1, n=2) }}",
        "{#- c -#}{% raw %}{{ no }}{% endraw -%} {%+ if 1 < 2 <= 2 != 3 and 'a' in 'abc' and 4 not in [1] %} "
        "{{- 'yes' if true else 'no' -}} {% endif +%}\n{% filter upper %}q{% endfilter %}{% with a = 1, b = 2 %}{{ a + "
        "b "
        "}}{% endwith %}{% generation %}g{% endgeneration %}{{ strftime_now('%d %B %Y') }}",
        "{% call(n) show2(1) %}{{ n }}{% endcall %}{% macro show2(a) %}<{{ caller(a) }}>{% endmacro %}{{ undefined.x "
        "}}",
        "{% macro r(n) %}{{ r(n + 1) }}{% endmacro %}{{ r(0) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999 }}{{ raise_exception('no: ' + messages[0].role) }}{{ 1.5 | round | int | abs | float }}",
        "{{ '%\\0' % 1 }}{{ '<%s>' | safe + '&' | e }}{{ ('<{}>' | safe).format('<') ~ ('a' | safe).join(['&']) }}",
        "{{ {'a': [1, (2,), {'b': none}], 1: 'é\\u00e9\\n\\x41'} }}{{ messages[1].content[-3:1:-1] }}{{ "
        "dict(a=1).items() }}",
    };
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
