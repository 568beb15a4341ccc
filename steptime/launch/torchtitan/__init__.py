"""torchtitan: TOML files, config functions and logs as a plan."""
