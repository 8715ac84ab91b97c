"""What two guides and a paper advise, measured on six models: docs/evidence/advice.md."""
