"""What a run did, for people: a page, a live view, a doctor, and the first difference between two runs."""
