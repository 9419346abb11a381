"""What strangers may and may not do."""
