"""Model files on disk: finding and fetching them, their configuration and metadata. No torch: the router reads them too."""
