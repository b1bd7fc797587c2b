"""A front's engines in other processes: where its requests are, which engine gets which, and what becomes of them when
an engine is lost.

A request is on one engine, or waits for an engine. An index is never used twice on a Work stream, and every token comes
with its position. So tokens of an attempt that is over are dropped, and an engine that leaves a token out, or sends
anything else that no engine may send, is cut off (WireError).

An engine reports its load every 0.25 to 1 s. It is lost when its Work stream breaks, or when it has sent nothing for
three seconds. Its requests go to other engines, oldest first and at most 64 Submits unanswered, or wait. Requests that
had begun on the lost engine (`Begun`) may have caused the loss: such requests are suspects until they make a token
(`suspects.py`). A group of suspects goes to one engine, which refuses those of other groups
(`engine_service/sinks.py`). The group, and requests that had not begun, wait until the engines that they may have ended
are back. If the engine turns out to run still, its suspects are cleared. A request that meets engines that fall silent
again and again is a suspect too (`silences.py`).

A request goes to the engine with the best score of cached prompt and load: by what engines report, and by what the
front has sent since (`placement.py`). A queued request leaves, by Withdraw, an engine that drains or whose queue is
much longer than another's. Running requests leave an engine that drains, a few at a time.

What is decided without input, output or a clock is listed as pure in `pyproject.toml`. Imports `wire/`, protocol, open
requests and deadlines of `engine/`, and values of `scheduling/`; no text, no scheduler, no shards. Begin with
`engine.py`, which presents all engines as one, then `books.py`, which keeps the state of every request.
"""
