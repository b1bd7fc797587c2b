"""The route /v1/responses, as OpenAI has it: its body becomes that of a chat, and pieces of a text become items and
events.

Begin with `routes.py`; `writer.py` does no input or output.
"""
