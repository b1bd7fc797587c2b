"""The routes /v1/messages and /v1/messages/count_tokens, as Anthropic has them: the body becomes that of a chat, and
pieces of a text become blocks and events.

Begin with `routes.py`; `writer.py` does no input or output.
"""
