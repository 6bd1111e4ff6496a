"""Types of what gdn writes and reads back: records, documents, profiles, and whose fault a status is."""
