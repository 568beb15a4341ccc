"""Everything a person reads: text, JSON, HTML. The only place that scales units."""
