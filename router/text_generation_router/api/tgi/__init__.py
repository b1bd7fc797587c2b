"""The native routes of TGI: /generate, /generate_stream and /.

`schemas.py` has the fields, `fields.py` looks for all others, `routes.py` has the endpoints.
"""
