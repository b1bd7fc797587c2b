"""The native routes of TGI: /generate, /generate_stream and /.

`schemas.py` has the fields, `fields.py` what fields of other servers mean here, `routes.py` the endpoints.
"""
