"""Tools, and calls of them in the supported formats."""

SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "boolean"}},
    "required": ["celsius"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of today", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"celsius": true}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"celsius": true}}'
WEATHER_CALL = ("weather", '{"celsius": true}')
