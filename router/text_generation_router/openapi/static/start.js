// Shows the document of this server. A validator of documents would be another server, so there is none.
SwaggerUIBundle({
  url: "/api-doc/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  tryItOutEnabled: true,
  validatorUrl: null,
});
