"""The stage table: name, candidate, rule of comparison; and what the candidates run on."""
