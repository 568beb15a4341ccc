"""All output for people: text, JSON, HTML. The only place that scales units."""
