/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of a chat's body that becomes the prompt, through the model's chat template:
 *
 * | field                  | values                                                           | default       |
 * |------------------------|------------------------------------------------------------------|---------------|
 * | messages               | at least one {role, content[, tool_calls, ...]}; required        |               |
 * | tools                  | [{type: "function", function: {name, description, parameters}}]  | none          |
 * | tool_choice            | "none" (the model does not see them), "auto", or a call is       | auto          |
 * |                        | forced: "required", {type, function: {name}} (forced_calls.h)    |               |
 * | parallel_tool_calls    | boolean; false: calls after the first are dropped, or, where they | true         |
 * |                        | are forced, not written                                          |               |
 * | add_generation_prompt  | boolean: the prompt ends where the assistant begins to speak     | true          |
 * | continue_final_message | boolean: it ends with the last message's content instead         | false         |
 * | chat_template_kwargs   | object: more variables of the template, such as enable_thinking  | none          |
 * | documents              | array, for templates that know it                                | none          |
 * Of a model with several templates (chat_template_choose) tools and documents choose the one that knows them.
 *
 * Roles: system, developer (as system, unless the template knows it), user, assistant, tool, function. Content: a
 * string, an array of {type: "text", text} parts, or null for an assistant's message. Messages go to the template with
 * all their fields; content and arguments of calls in the form that it takes (struct chat_abilities).
 */
#ifndef SERVER_CHAT_MESSAGES_H
#define SERVER_CHAT_MESSAGES_H

#include "server/params.h"

/* Renders the prompt to *text (the caller's to free) and fills *tools with what calls are to be looked for. */
int chat_messages_render(const json_t *body, const struct parse_context *context, struct tool_set *tools,
    struct template_text *text, struct fault *fault);

#endif
