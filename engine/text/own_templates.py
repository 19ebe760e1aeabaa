"""Chat templates of families that publish none in Jinja: the form of the conversation is the publisher's (for
DeepSeek-V3.2 the folder `encoding` of its repository), the wording of the instructions for tools is laddertron's.
"""

from __future__ import annotations

_DEEPSEEK_V32 = r"""
{%- set think = thinking or enable_thinking -%}
{%- set at = namespace(question=-1) -%}
{%- for m in messages -%}
{%- if m.role in ('user', 'developer') -%}{%- set at.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro opened(index) -%}{{ '<think>' if think and index >= at.question else '</think>' }}{%- endmacro -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools -%}
{{- '\n\n## Tools\n\nYou may call functions. To call some, write one block of calls in your reply:\n\n' -}}
{{- '<｜DSML｜function_calls>\n<｜DSML｜invoke name="FUNCTION">\n' -}}
{{- '<｜DSML｜parameter name="PARAMETER" string="true|false">VALUE</｜DSML｜parameter>\n...\n' -}}
{{- '</｜DSML｜invoke>\n...\n</｜DSML｜function_calls>\n\n' -}}
{{- 'Write a string as it is, without quotes and escapes, with string="true", and any other value as JSON, with ' -}}
{{- 'string="false". The functions, with the JSON Schema of their parameters:\n\n<functions>\n' -}}
{%- for tool in tools -%}{{- tool.function | tojson ~ '\n' -}}{%- endfor -%}
{{- '</functions>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role in ('user', 'developer') -%}
{{- '<｜User｜>' ~ m.content -}}
{%- if not loop.last or add_generation_prompt -%}{{- '<｜Assistant｜>' ~ opened(loop.index0) -}}{%- endif -%}
{%- elif m.role == 'tool' -%}
{{- '\n\n<function_results>' if loop.first or loop.previtem.role != 'tool' -}}
{{- '\n<result>' ~ m.content ~ '</result>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}
{{- '\n</function_results>' -}}
{%- if not loop.last or add_generation_prompt -%}{{- '\n\n' ~ opened(loop.index0) -}}{%- endif -%}
{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- if think and loop.index0 > at.question -%}{{- (m.reasoning_content or '') ~ '</think>' -}}{%- endif -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}
{{- '\n\n<｜DSML｜function_calls>\n' -}}
{%- for call in m.tool_calls -%}
{{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
{{- (value if value is string else value | tojson) ~ '</｜DSML｜parameter>' ~ ('' if loop.last else '\n') -}}
{%- endfor -%}
{{- '\n</｜DSML｜invoke>\n' -}}
{%- endfor -%}
{{- '</｜DSML｜function_calls>' -}}
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- elif not loop.first -%}
{{- m.content -}}
{%- endif -%}
{%- endfor -%}
"""

OWN_TEMPLATES = {"deepseek_v32": _DEEPSEEK_V32}
"""By the `model_type` of config.json; a template in the folder replaces it."""
