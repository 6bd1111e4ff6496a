"""Records -> what a person reads or a program does. Nothing else in gdn makes text of results."""
