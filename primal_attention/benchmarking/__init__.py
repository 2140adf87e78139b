"""How long a layer takes and how much memory it needs, beside the least that is possible."""
