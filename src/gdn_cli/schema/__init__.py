"""Types that gdn writes and reads back: records, documents, profiles, statuses."""
