"""The service: searches of many people, submitted over HTTP, kept in SQL, each run by a driver process of its own."""
