"""The routes: each dialect (TGI's, OpenAI's, Anthropic's) in a folder of its own, and here the routes that belong to no
dialect or to all dialects.

`anthropic/` and `responses/` import `openai/`, because their bodies are converted to bodies of chats; these import
`tgi/`, and all import `common/`. Begin with `common/answer.py`, the steps from a request to its answer, then
`tgi/routes.py`.
"""
