"""An app with a user model of its own: people log in by their address and have no username."""
