"""What an auditor asks: where a row came from, whether it was tampered with, what differs, what may be deleted."""
