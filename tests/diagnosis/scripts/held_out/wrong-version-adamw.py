from transformers import AdamW, AutoTokenizer

print(AdamW, AutoTokenizer)
