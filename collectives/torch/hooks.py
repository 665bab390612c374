"""x"""
Int8State=PowerSGDState=int8_hook=powersgd_hook=None
