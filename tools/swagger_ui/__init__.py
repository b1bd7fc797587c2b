"""The files of Swagger UI that the router serves at /docs, and where they come from."""
