"""Chat templates that do what those of well-known models do, in few words."""

from __future__ import annotations

# A system message of its own where there is none; calls; answers of tools together in one turn.
QWEN25 = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'Help.' }}{%- endif %}
{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' ~ m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# What was thought is shown since the last question alone, and for the last answer even where it is nothing.
QWEN3 = """{%- set ns = namespace(asked=messages | length - 1, looks=true) %}
{%- for m in messages[::-1] %}
{%- if ns.looks and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.looks = false %}{%- set ns.asked = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set said = m.content if m.content is string else '' %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' ~ said ~ '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role != 'assistant' %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ said ~ '<|im_end|>\\n' }}
{%- else %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ said.lstrip('\\n') }}
{%- else %}{{- said }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The system message within the first question; strict turns; no prompt for an answer.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system %}{% set said = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
{%- else %}{% set said = m['content'] %}{% endif %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + said.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
LLAMA3 = """{%- for m in messages %}
{%- set said = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{%- set said = bos_token + said %}{%- endif %}
{{- said }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# The system message stands with the last question, and only where nothing follows that.
MISTRAL = """{%- set rest = messages %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}{%- endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('turns must alternate') }}{%- endif %}
{%- if m.role == 'user' and loop.last and system is defined %}
{{- '[INST] ' ~ system ~ '\\n\\n' ~ m.content ~ '[/INST]' }}
{%- elif m.role == 'user' %}{{- '[INST] ' ~ m.content ~ '[/INST]' }}
{%- else %}{{- ' ' ~ m.content | trim ~ eos_token }}
{%- endif %}
{%- endfor %}"""
# The prompt begins to think in the model's stead, and nothing of that is shown later.
R1 = """{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<|User|>' ~ m.content }}
{%- else %}
{%- set said = m.content %}
{%- if '</think>' in said %}{%- set said = said.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' ~ said ~ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('no system here') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('turns must alternate') }}{%- endif %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}
{{- m.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
# Nothing stands where an answer ends.
ALPACA = """{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content ~ '\\n\\n' }}
{%- elif m.role == 'user' %}{{- '### Instruction:\\n' ~ m.content ~ '\\n\\n' }}
{%- else %}{{- '### Response:\\n' ~ m.content }}{%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}"""
TOLD = """{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{- m.content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""
