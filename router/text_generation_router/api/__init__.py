"""The routes: each dialect in a folder of its own, and here what belongs to no dialect or to all of them.

`anthropic/` and `responses/` import `openai/`, because their bodies become those of chats; these import `tgi/`, and all
import `common/`. Begin with `common/answer.py`, the steps from a request to its answer, then `tgi/routes.py`.
"""
