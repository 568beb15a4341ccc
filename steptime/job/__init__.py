"""A plan read and checked: sections, mesh, rules, and the parts of the model on each stage."""
