"""Reading what people already have: launch scripts, framework configs and logs, as the Job that a YAML would hold."""
