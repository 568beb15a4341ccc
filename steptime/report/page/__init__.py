"""The report as one self-contained HTML file: no network, no fonts, no server."""
