"""Chat templates, by family, for models published without a template but trained on a format."""

from __future__ import annotations

from typing import Final

_QWEN2_AUDIO: Final = """\
{%- set clips = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif -%}
    {{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'audio' -%}
                {%- set clips.count = clips.count + 1 -%}
                {{ 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
            {%- else -%}
                {{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
DEFAULT_CHAT_TEMPLATES: Final = {"qwen2_audio": ("<|AUDIO|>", _QWEN2_AUDIO)}
"""The placeholder and the template. Used where a folder has none, or one for text alone, without the placeholder."""
