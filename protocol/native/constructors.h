// Constructors of the AMQP values that the extension knows (AMQP 1.0, 1.6); the number is the width of their size.
#ifndef PEEKLOCK_CONSTRUCTORS_H
#define PEEKLOCK_CONSTRUCTORS_H

enum {
    NULL_VALUE = 0x40,
    TRUE_VALUE = 0x41,
    FALSE_VALUE = 0x42,
    UINT_0 = 0x43,
    LIST_0 = 0x45,
    UBYTE = 0x50,
    SMALL_UINT = 0x52,
    UINT = 0x70,
    BINARY_8 = 0xA0,
    STRING_8 = 0xA1,
    SYMBOL_8 = 0xA3,
    BINARY_32 = 0xB0,
    STRING_32 = 0xB1,
    LIST_8 = 0xC0,
    MAP_8 = 0xC1,
    LIST_32 = 0xD0,
    MAP_32 = 0xD1,
};

#endif
