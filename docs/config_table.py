"""Print docs/config.md: every key of a plan, from the classes and data/keys.yaml."""

from steptime.report.key_pages import markdown
from steptime.report.plan_keys import keys

if __name__ == "__main__":
    print(markdown(keys()), end="")
