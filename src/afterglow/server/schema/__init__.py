"""The bodies of requests, field by field. What a field means, the routes know."""
