"""Request and response bodies as pydantic models. They validate fields; the routes implement them."""
