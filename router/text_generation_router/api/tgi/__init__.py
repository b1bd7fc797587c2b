"""The native routes of TGI: /generate, /generate_stream and /.

`schemas.py` has the fields of bodies, `fields.py` looks for other fields in bodies, `routes.py` has the endpoints.
"""
