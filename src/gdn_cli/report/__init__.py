"""Turns records into screens, pages, tables and JSON. No other room formats results."""
