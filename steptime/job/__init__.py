"""What a plan says: sections, mesh, rules, and the parts of the model on each stage."""
