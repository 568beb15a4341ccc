"""Numbers, units, YAML documents, the base of config classes, result rows, standard streams."""
