"""Mailboxes and weights between processes."""
