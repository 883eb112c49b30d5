from transformers import TrainingArguments

TrainingArguments(output_dir="out", evaluation_strategy="steps", report_to="none", use_cpu=True)
