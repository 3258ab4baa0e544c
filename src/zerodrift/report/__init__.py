"""Plans, traces and update statistics as terminal text, an HTML page or JSON."""
