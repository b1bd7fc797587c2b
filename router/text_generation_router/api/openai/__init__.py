"""The routes /v1/completions and /v1/chat/completions, as OpenAI has them, and TGI's own form of chats.

Begin with `chat.py`; `chat_prompt.py` makes the prompt of every chat, also of the routes in `responses/` and
`anthropic/`.
"""
