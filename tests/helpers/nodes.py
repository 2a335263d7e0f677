"""What tests of the mailbox transport share."""

KEY = bytes(range(32))
