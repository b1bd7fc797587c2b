"""The documents of the HTTP interface: the OpenAPI document, and the page that shows it."""
