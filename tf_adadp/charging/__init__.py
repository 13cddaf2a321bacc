"""Charges and releases: each release is paid for by one charge, before it is made."""
