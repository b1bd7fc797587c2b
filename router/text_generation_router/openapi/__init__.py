"""The documents of the HTTP interface: the OpenAPI document, and the page that shows it.

Imports the schemas of `api/`. Begin with `operations.py`, the routes as rows, then `document.py`.
"""
