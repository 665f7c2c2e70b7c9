"""From an audited run to what is published: record, weights, model card and the form that Transformers loads."""
